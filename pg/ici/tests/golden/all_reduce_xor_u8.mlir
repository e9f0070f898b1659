module @all_reduce attributes {mhlo.num_partitions = 1 : i32, mhlo.num_replicas = 4 : i32} {
  func.func public @main(%arg0: tensor<2x32x128xui8>) -> (tensor<2x32x128xui8>) {
    %0 = "stablehlo.all_to_all"(%arg0) {split_dimension = 0 : i64, concat_dimension = 0 : i64, split_count = 2 : i64, replica_groups = dense<[[0, 2], [3, 1]]> : tensor<2x2xi64>} : (tensor<2x32x128xui8>) -> tensor<2x32x128xui8>
    %1 = stablehlo.constant dense<0> : tensor<ui8>
    %2 = stablehlo.reduce(%0 init: %1) applies stablehlo.xor across dimensions = [0] : (tensor<2x32x128xui8>, tensor<ui8>) -> tensor<32x128xui8>
    %3 = stablehlo.reshape %2 : (tensor<32x128xui8>) -> tensor<1x32x128xui8>
    %4 = "stablehlo.all_gather"(%3) {all_gather_dim = 0 : i64, replica_groups = dense<[[0, 2], [3, 1]]> : tensor<2x2xi64>} : (tensor<1x32x128xui8>) -> tensor<2x32x128xui8>
    return %4 : tensor<2x32x128xui8>
  }
}
